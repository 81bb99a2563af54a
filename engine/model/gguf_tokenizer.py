"""The tokenizer of a GGUF file, as transformers reads it, with corrections of what differs from llama.cpp."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.model.model_files import read_json

TOKENIZER_FILE: Final = "tokenizer.json"  # name in transformers
END_KEYS: Final = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
# names of control tokens that llama.cpp takes for end tokens in any model
END_NAMES: Final = frozenset({
    "<end_of_turn>", "<|call|>", "<|end_of_text|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>",
    "<|return|>",
})  # fmt: skip
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# values of tokenizer.ggml.pre
SINGLE_DIGITS: Final = frozenset({
    "codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder",
})  # fmt: skip
AS_GPT2: Final = frozenset({"gpt-2", "jais", "mpt", "olmo", "phi-2"})
# texts begin with a token unless the file says otherwise, and pieces in the vocabulary need no merges
AS_LLAMA3: Final = frozenset({
    "falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken",
})  # fmt: skip
PLAIN: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def save_tokenizer(source: Path, reader: GGUFReader, target: Path, warn: Callable[[str], None]) -> None:
    """Write the tokenizer of `source`, which `reader` has open, into `target`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    splitter = _value(reader, "pre")
    is_byte_level = _value(reader, "model") == "gpt2"
    if is_byte_level:  # other kinds of vocabulary have no splitters
        _split_as_trained(tokenizer, splitter, warn)
        if splitter in AS_LLAMA3 and _value(reader, "add_bos_token") is None:
            tokenizer.add_bos_token = True
    tokenizer.save_pretrained(target)
    path = target / TOKENIZER_FILE
    saved = read_json(path)
    if is_byte_level:
        if splitter in AS_LLAMA3:
            saved["model"]["ignore_merges"] = True
        _name_as_in_file(saved, reader)
    elif _value(reader, "add_space_prefix") is False:
        for part in (*_parts(saved["pre_tokenizer"]), *_parts(saved["decoder"])):
            if part["type"] == "Metaspace":
                part["prepend_scheme"] = "never"
    path.write_text(json.dumps(saved, ensure_ascii=False), encoding="utf-8")


def end_tokens(reader: GGUFReader) -> list[int]:
    """Return ids that end a text or a turn. transformers reads only the first of END_KEYS."""
    named = {name: i for i, name, kind in _tokens(reader) if kind == CONTROL and name in END_NAMES}
    if "<|return|>" in named:
        named.pop("<|end|>", None)  # in gpt-oss it ends a message, and the answer continues with the next
    return sorted({*named.values(), *(reader.fields[key].contents() for key in END_KEYS if key in reader.fields)})


def _split_as_trained(tokenizer: Any, splitter: Any, warn: Callable[[str], None]) -> None:
    """Split texts before BPE as the authors did. transformers splits as GPT-2 if it does not know the splitter."""
    if splitter in SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif splitter not in AS_GPT2 and splitter not in GGUF_PRE_TOKENIZER_SPLITS:
        warn(f"its tokenizer.ggml.pre is {splitter!r}, which is unknown: texts are split as for GPT-2")


def _name_as_in_file(saved: dict[str, Any], reader: GGUFReader) -> None:
    """Give the added tokens of a byte-level vocabulary the file's names and ids.

    transformers writes characters outside the byte alphabet as bytes, as in DeepSeek's tokens. It adds those tokens again
    after the vocabulary, and tokens that the file lacks, such as GPT-2's `<|endoftext|>`.
    """
    tokens = list(_tokens(reader))
    names = {name: i for i, name, _ in tokens}
    pieces = {i: piece for piece, i in saved["model"]["vocab"].items() if i < len(tokens)}
    added = {token["id"]: token for token in saved["added_tokens"] if token["id"] < len(tokens)}
    for i, name, kind in tokens:
        if kind in {CONTROL, USER_DEFINED}:
            pieces[i] = name
            added[i] = PLAIN | added.get(i, {}) | {"id": i, "content": name, "special": kind == CONTROL}
    saved["added_tokens"] = [added[i] for i in sorted(added)]
    saved["model"]["vocab"] = {pieces[i]: i for i in sorted(pieces)}
    for part in _parts(saved["post_processor"]):
        for token in part.get("special_tokens", {}).values():
            token["ids"] = [names[name] for name in token["tokens"]]


def _tokens(reader: GGUFReader) -> Iterator[tuple[int, str, int]]:
    """Yield id, name and type of each token; none if the file has no types."""
    names, kinds = (reader.fields.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if names is not None and kinds is not None:
        for i, (name, kind) in enumerate(zip(names.contents(), kinds.contents(), strict=False)):
            yield i, name, kind


def _parts(of: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a step of a tokenizer, and those in it if it is a sequence."""
    if of is not None:
        yield of
        for name in ("pretokenizers", "decoders", "processors"):
            yield from of.get(name, ())


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(f"tokenizer.ggml.{key}")
    return None if field is None else field.contents()
