"""Serve hybrid models with vLLM, which then caches only the window of a sliding head.

`pip install .[vllm]` makes this a plugin of vLLM through the entry point `vllm.general_plugins`.
`plan` needs neither vLLM nor torch; vLLM loads everything else.
"""
