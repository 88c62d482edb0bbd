"""vLLM's table of environment variables: our names are made known, and its compile caches salted.

``vllm.envs.compile_factors`` hashes every key of ``environment_variables``, so one more key changes every cache key.
Without that, an untapped artifact would be loaded for a tapped engine in silence. Our own variables enter with a
constant: they are read from the environment by us, and a store's address must not change what is compiled.
"""

from __future__ import annotations

from engine_side.config import VARIABLES, from_environment
from schemas.errors import StartError


def connect() -> None:
    """Make the compile-cache keys of this process depend on what is armed when they are made."""
    import vllm.envs

    variables = getattr(vllm.envs, "environment_variables", None)
    if not isinstance(variables, dict) or not hasattr(vllm.envs, "compile_factors"):
        raise StartError("vllm-tap: looked for vllm.envs.environment_variables and compile_factors, not found: "
                         "compiled graphs of untapped models could be reused")
    variables["VLLM_TAP_SALT"] = lambda: config.salt() if (config := from_environment()) else None
    for name in VARIABLES:
        variables[name] = lambda: None
