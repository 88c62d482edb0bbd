"""vLLM's compile caches: salt them, or an untapped artifact would be loaded for a tapped engine in silence.

``vllm.envs.compile_factors`` hashes every key of ``environment_variables``, so one more key changes every cache key.
"""

from __future__ import annotations

from schemas.errors import StartError


def salt(text: str) -> None:
    """Make the compile-cache keys of this process depend on ``text``."""
    import vllm.envs

    variables = getattr(vllm.envs, "environment_variables", None)
    if not isinstance(variables, dict) or not hasattr(vllm.envs, "compile_factors"):
        raise StartError("vllm-tap: looked for vllm.envs.environment_variables and compile_factors, not found: "
                         "compiled graphs of untapped models could be reused")
    variables["VLLM_TAP_SALT"] = lambda: text
