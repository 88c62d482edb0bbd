"""A codec that vllm-tap does not bring: int8 with one scale a row."""
