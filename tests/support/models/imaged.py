"""Small models that take images: a processor of each, made in code, and images.

Every tokenizer has 512 words. The first are the special tokens; of an image's the same are at the same place in all:
4 begins it, 5 ends it, 6 stands for a part of it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS: Final = 512
BEGIN, END, PART = 4, 5, 6
NO_VISION: Final = "" if importlib.util.find_spec("torchvision") else (
    "torchvision is not installed, which vLLM needs for models that take images")


@dataclass(frozen=True, slots=True)
class Imaged:
    """How a family takes images.

    ``special``: its tokens from 4 on, by what its processor calls them; blanks where it has no name. ``processor``:
    makes it of a tokenizer. ``asks``: the tokens that stand for an image in a prompt before it is processed.
    ``kinds``: what Hugging Face's forward calls the tensor that says which tokens are an image's. ``published``: how a
    name of a weight begins as Hugging Face saves it, and as published files and vLLM have it.
    """

    special: dict[str, str]
    processor: Callable[[PreTrainedTokenizerFast], Any]
    asks: tuple[int, ...]
    kinds: str = ""
    published: tuple[str, str] = ("", "")


def _class(family: str, module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.{module}"), name)


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = _class("gemma3", "image_processing_pil_gemma3", "Gemma3ImageProcessorPil")
    return _class("gemma3", "processing_gemma3", "Gemma3Processor")(
        image_processor=images(size={"height": 32, "width": 32}), tokenizer=tokenizer, image_seq_length=4)


def _pixtral(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = _class("pixtral", "image_processing_pil_pixtral", "PixtralImageProcessorPil")
    return _class("pixtral", "processing_pixtral", "PixtralProcessor")(
        image_processor=images(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}), tokenizer=tokenizer,
        patch_size=8, spatial_merge_size=2, image_token="[IMG]", image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]")


def _qwen(family: str, processor: str, videos: tuple[str, str, str]) -> Callable[[PreTrainedTokenizerFast], Any]:
    def make(tokenizer: PreTrainedTokenizerFast) -> Any:
        images = _class("qwen2_vl", "image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
        patches = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
        return _class(family, f"processing_{family}", processor)(
            image_processor=images(min_pixels=16 * 16, max_pixels=64 * 64, **patches), tokenizer=tokenizer,
            video_processor=_class(*videos)(**patches))

    return make


_QWEN: Final = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>",
                "image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN_TAKES: Final[dict[str, Any]] = {"asks": (BEGIN, PART, END), "kinds": "mm_token_type_ids"}
_VIDEO2 = ("qwen2_vl", "video_processing_qwen2_vl", "Qwen2VLVideoProcessor")
_VIDEO3 = ("qwen3_vl", "video_processing_qwen3_vl", "Qwen3VLVideoProcessor")

# Hugging Face's Gemma 3 lets the parts of an image attend to later ones where it is told which they are
# (``token_type_ids``). vLLM's CPU attention does not, taps or none, so the reference is not told either.
IMAGED: Final[dict[str, Imaged]] = {
    "gemma3": Imaged({"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>",
                      **{" " * lines: "\n" * lines for lines in (1, 2, 3, 4)}}, _gemma3, (BEGIN,),
                     published=("vision_tower.", "vision_tower.vision_model.")),
    "mistral3": Imaged({"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]"},
                       _pixtral, (PART,)),
    "qwen2_vl": Imaged(_QWEN, _qwen("qwen2_vl", "Qwen2VLProcessor", _VIDEO2), **_QWEN_TAKES),
    "qwen2_5_vl": Imaged(_QWEN, _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor", _VIDEO2), **_QWEN_TAKES),
    "qwen3_vl": Imaged(_QWEN, _qwen("qwen3_vl", "Qwen3VLProcessor", _VIDEO3), **_QWEN_TAKES),
}


def processor(family: str) -> Any:
    """Hugging Face's processor of a family."""
    special = IMAGED[family].special
    words = ["<pad>", "<s>", "</s>", "<unk>", *special.values()]
    words += [f"w{number}" for number in range(len(words), WORDS)]
    built = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(words[: 4 + len(special)])
    return IMAGED[family].processor(PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens={name: word for name, word in special.items() if name.strip()}))


def save(family: str, folder: Path) -> None:
    """Put what takes images beside a model that was saved, and give its weights the names that vLLM reads."""
    processor(family).save_pretrained(folder)
    saved, published = IMAGED[family].published
    if saved:
        path = folder / "model.safetensors"
        named = {name.replace(saved, published): weight for name, weight in load_file(path).items()}
        save_file(named, path, {"format": "pt"})


def image(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    """An image of random colours."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
