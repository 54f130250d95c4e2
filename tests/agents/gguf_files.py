"""A tiny Llama in a GGUF file, quantized like SmolLM2's."""

from pathlib import Path

import gguf
import numpy as np

WIDTH, NUM_HEADS, INNER = 32, 2, 64
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokens() -> list[str]:
    """The characters that stand for the 256 bytes in a GPT-2 vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "Ġt", "Ġth"]


def write_gguf(path: Path, *, template: str | None = CHATML, inner: int = INNER) -> dict[str, np.ndarray]:
    """Write the file; return the weights that a reader gets, by their names in the file."""
    writer = gguf.GGUFWriter(path, "llama")
    fields = {
        "name": "tiny",
        "context_length": 2048,
        "embedding_length": WIDTH,
        "block_count": 1,
        "feed_forward_length": inner,
        "head_count": NUM_HEADS,
        "head_count_kv": NUM_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10_000.0,
        "rope_dimension_count": WIDTH // NUM_HEADS,
        "vocab_size": len(TOKENS),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "default",
        "token_list": TOKENS,
        "token_types": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "token_merges": ["Ġ t", "Ġt h"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    if template is not None:
        writer.add_chat_template(template)
    rng, read = np.random.default_rng(0), dict[str, np.ndarray]()
    shapes = {
        "token_embd": (len(TOKENS), WIDTH),
        **{f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (inner, WIDTH),
        "blk.0.ffn_up": (inner, WIDTH),
        "blk.0.ffn_down": (WIDTH, inner),
    }
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        packed = gguf.quantize(rng.normal(0, 0.3, shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        read[name] = gguf.dequantize(packed, kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read
