"""The whole line on a small model, shown in two minutes: ``make demo`` or ``python -m vllm_tap.demo``."""
