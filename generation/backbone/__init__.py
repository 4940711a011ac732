"""The backbone as the decoding loop sees it: its forward, its cache, and which backbones drafts can be verified on."""
