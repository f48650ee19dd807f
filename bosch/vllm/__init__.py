"""Serve hybrid models with vLLM, which then keeps a sliding head's window and no more.

`pip install .[vllm]` makes this a plugin of vLLM by the entry point `vllm.general_plugins`.
`plan` needs neither vLLM nor torch; everything else is loaded by vLLM itself.
"""
