"""What the networks of several methods share: parts of a backbone, losses in chunks, teachers, loading, saving."""
