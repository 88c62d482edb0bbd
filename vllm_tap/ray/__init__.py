"""Captures for Ray Data; needs ``pip install 'vllm-tap[ray]'``.

>>> from vllm_tap.ray import read_captures                                       # doctest: +SKIP
>>> read_captures("captures", sites="resid_post", layers=12).take(1)[0].keys()   # doctest: +SKIP
dict_keys(['capture', 'position', 'token_id', 'row', 'resid_post.12'])
"""

from vllm_tap.ray.captures import read_captures

__all__ = ["read_captures"]
