"""``python -m vllm_tap`` is ``vllm-tap``."""

from vllm_tap.cli.main import main

main()
