"""``python -m vllm_tap`` is ``vllm-tap``."""

from vllm_tap.cli.main import main

if __name__ == "__main__":
    main()
