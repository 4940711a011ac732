"""Whether a decoding function is lossless: a kit for any of them, and what it says of those that are known."""
