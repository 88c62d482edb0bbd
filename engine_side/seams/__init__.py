"""The only files that touch vLLM's internals: one a place, each wrapping a named attribute and proving it is there.

Wrapped on import of the module that owns the attribute, so a process that never imports it pays nothing.
"""
