"""EAGLE-3 speculative decoding for stock vLLM: serve, train, measure."""

__version__ = "0.1.0"
