"""LoRA (Hu et al. 2021): a language model of the Hub learns your text. Needs `transformers`.

The pretrained weights are frozen. Beside each chosen layer W, two small matrices learn: W + B A.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--network", default="HuggingFaceTB/SmolLM2-135M", help="on the Hub, or a folder")
    add("--text", help="a file of text; Python's argparse.py if it is not given")
    add("--seq_len", type=int, default=256, help="tokens of a sample")
    add("--lora_rank", type=int, default=8, help="columns of B, and rows of A")
    add("--lora_layers", nargs="+", default=["q_proj", "v_proj"], help="ends of layers' names")
    return parse_run_args(parser, epochs=1, batch_size=8, learning_rate=3e-4, max_grad_norm=1.0)


def read_data(args):
    """Returns two parts of the text, in samples of seq_len + 1 tokens. The last tenth validates."""
    text = Path(args.text or argparse.__file__).read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(args.network)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    num_samples = len(ids) // (args.seq_len + 1)
    samples = ids[: num_samples * (args.seq_len + 1)].reshape(num_samples, args.seq_len + 1)
    num_train = num_samples * 9 // 10
    return TensorDataset(samples[:num_train]), TensorDataset(samples[num_train:])


class LoRA(nn.Module):
    """Adds the product of two small matrices to a frozen layer. At first, the product is 0."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + 2 * (x @ self.a.T @ self.b.T)  # 2: alpha / rank, as is usual


def create_model(args, data):
    network = AutoModelForCausalLM.from_pretrained(args.network, dtype=torch.float32)
    network.requires_grad_(False)
    for name, layer in [*network.named_modules()]:
        if isinstance(layer, nn.Linear) and name.endswith(tuple(args.lora_layers)):
            network.set_submodule(name, LoRA(layer, args.lora_rank))
    return network


def batch_loss(model, batch, args):
    (tokens,) = batch  # (B, T + 1), without padding: each process has the same number of tokens
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # (B, T, V)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    count = tokens[:, 1:].numel()
    return loss, {"loss": loss * count, "count": count}
