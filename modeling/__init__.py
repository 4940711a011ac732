"""The networks. Nothing here knows how drafts are judged."""
