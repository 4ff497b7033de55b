"""`python -m vllm_eagle3` is the command line, as `vllm-eagle3` is."""

from vllm_eagle3.cli import main

main()
