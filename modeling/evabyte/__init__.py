"""EvaByte: backbone, attention, cache, tokenizer, `EvaByteForMTPC`."""
