"""Drafts that are looked up in texts, and cascades of drafters."""
