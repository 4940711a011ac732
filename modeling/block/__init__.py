"""Block drafters (DFlash, DFlash 2, DSpark): body, layouts, laws of a block's tokens, `BlockDrafter`."""
