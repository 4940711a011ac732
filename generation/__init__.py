"""How a draft is made and judged."""
