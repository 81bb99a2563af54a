"""A small tokenizer: byte-level BPE with chat tokens and a template."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from components.text.tokenizer import TextModel

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' and m.name == 'nobody' %}{{ raise_exception('nobody may speak') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LINES = ["Hello, how are you today?", "The capital of France is Paris.", "system user assistant", "één café, 東京, 😀"]


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def tiny_text_model(template: str | None = TEMPLATE) -> TextModel:
    return TextModel(tiny_tokenizer(), template, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
