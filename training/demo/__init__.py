"""What `tokenahead demo` does, step by step."""
