"""Turn a trained GPT into a folder that Hugging Face's transformers can load.

    python examples/to_hf.py gpt.pt my_gpt   # a file that --snapshot of a gpt.py has written
    python examples/to_hf.py big my_gpt      # a folder of hybrid/gpt_fsdp.py: its shards are merged

It needs `pip install transformers`. Other programs that read this format can load the folder, too.
Use it like this:

    from transformers import pipeline
    print(pipeline("text-generation", "my_gpt")("Once upon", max_new_tokens=20))

The model is a GPT-2. The biases of its linear layers are 0, because our layers have none. The
tokenizer is that of the training. If the GPT was trained on the bytes of a text, a byte is a token.
"""

import argparse
import json
import pickle
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

LAYERS = {"norm1": "ln_1", "qkv": "attn.c_attn", "projection": "attn.c_proj"}
LAYERS |= {"norm2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}
KINDS = {  # the objects that describe shards, by module. No others are made
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",  # Python 3.13
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": """Metadata StorageMeta MetadataIndex TensorProperties
        TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata _MEM_FORMAT_ENCODING""",
}


class Metadata(pickle.Unpickler):
    """Reads what PyTorch wrote about the shards. It makes no other objects, so no code is run."""

    def find_class(self, module, name):
        is_number_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_number_type and name not in KINDS.get(module, "").split():
            raise pickle.UnpicklingError(f"the shards have a {module}.{name}, and should not")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        with open(Path(self.path, ".metadata"), "rb") as file:
            return Metadata(file).load()


def read_snapshot(path):
    """Returns the weights by name, and the settings of the training."""
    if not path.is_dir():
        snapshot = torch.load(path, "cpu", weights_only=True, mmap=True)
        return snapshot["model"], snapshot["settings"]
    folders = [path, *path.glob("step-*")]
    complete = [folder for folder in folders if (folder / "settings.json").exists()]
    if not complete:
        sys.exit(f"{path} has no complete snapshot")
    newest = max(complete)
    reader = Reader(newest)
    weights = {}
    for name, part in reader.read_metadata().state_dict_metadata.items():
        if name.startswith("model."):
            weights[name.removeprefix("model.")] = torch.empty(part.size)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is enough
    dcp.load({"model": weights}, storage_reader=reader, no_dist=True)  # in place
    return weights, json.loads((newest / "settings.json").read_text())


def gpt2_of(weights, settings, end_id):
    """Returns the GPT-2 that computes the same logits."""
    config = GPT2Config(
        vocab_size=settings["vocab_size"],
        n_positions=settings["seq_len"],
        n_embd=settings["d_model"],
        n_layer=settings["num_layers"],
        n_head=settings["n_heads"],
        activation_function="gelu",  # ours. That of GPT-2 is an approximation of it
        embd_pdrop=settings["dropout"],
        resid_pdrop=settings["dropout"],
        attn_pdrop=0.0,
        bos_token_id=end_id,  # as in GPT-2: a text begins with the token that ends the one before
        eos_token_id=end_id,
    )
    model = GPT2LMHeadModel(config)
    new = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    new["transformer.wte.weight"] = new["lm_head.weight"] = weights["embedding.weight"]
    new["transformer.wpe.weight"] = weights["positions.weight"]
    for kind in ("weight", "bias"):
        new[f"transformer.ln_f.{kind}"] = weights[f"norm.{kind}"]
    for name, weight in weights.items():
        if name.startswith("blocks."):
            _, number, layer, kind = name.split(".")
            is_linear = not layer.startswith("norm")
            weight = weight.T if is_linear else weight  # GPT-2 stores these matrices transposed
            new[f"transformer.h.{number}.{LAYERS[layer]}.{kind}"] = weight
    model.load_state_dict(new)
    return model


def byte_tokenizer():
    """Returns a tokenizer in which the id of a byte is the value of the byte."""
    # Instead of each byte, ByteLevel writes a character that can be printed, by the rule of GPT-2.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + number): byte for number, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def find_tokenizer(settings):
    """Returns the tokenizer of the training's data, and the name of its end-of-text token."""
    folder = Path(settings["dataset"])
    if not folder.is_dir() and settings["vocab_size"] == 256:
        return byte_tokenizer(), None
    if not (folder / "tokenizer.json").exists():
        sys.exit(
            f"there is no {folder}/tokenizer.json: --tokens must name the folder of the tokens"
        )
    about = folder / "tokens.json"
    end_name = json.loads(about.read_text())["end_of_text"] if about.exists() else None
    return Tokenizer.from_file(str(folder / "tokenizer.json")), end_name


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("snapshot", type=Path, help="a file, or a folder of shards")
    parser.add_argument("out", type=Path, help="folder that is written")
    parser.add_argument("--tokens", help="folder of the tokens, if it is no longer where it was")
    args = parser.parse_args()
    weights, settings = read_snapshot(args.snapshot)
    if "seq_len" not in settings or "positions.weight" not in weights:
        sys.exit(f"{args.snapshot} is no snapshot of a GPT")
    if args.tokens:
        settings["dataset"] = args.tokens
    tokenizer, end_name = find_tokenizer(settings)
    end_id = tokenizer.token_to_id(end_name) if end_name else None
    model = gpt2_of(weights, settings, end_id)
    model.save_pretrained(args.out)
    names = {"bos_token": end_name, "eos_token": end_name} if end_name else {}
    names["model_max_length"] = settings["seq_len"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(args.out)
    print(f"{args.out} has a GPT-2 of {model.num_parameters():,} parameters, and its tokenizer")


if __name__ == "__main__":
    main()
