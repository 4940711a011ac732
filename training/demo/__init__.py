"""`tokenahead demo`: measures the model in the box and shows what it wrote."""
