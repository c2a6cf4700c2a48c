"""``python -m p2pllm``."""

from p2pllm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
