"""A Hugging Face model, fine-tuned on a Hugging Face dataset: needs `pip install transformers`."""

from datasets import Value, load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--network", default="distilbert/distilbert-base-uncased", help="on the Hub, or a folder")
    add("--texts", default="stanfordnlp/imdb", help="on the Hub, or a folder: text and label")
    add("--seq_len", type=int, default=256, help="longest text in tokens; the rest is cut off")
    return parse_run_args(parser, epochs=2, batch_size=32, learning_rate=5e-5, max_grad_norm=1.0)


def has_label(label):
    """None, NaN, blanks, and -1, the hub's own mark, are no labels."""
    if isinstance(label, str):
        return label.strip() != ""
    return label not in (None, -1) and label == label  # NaN differs from itself


def read_data(args):
    """Returns two datasets whose samples are dictionaries. `map` caches what it has made."""
    try:
        splits = load_dataset(args.texts).select_columns(["text", "label"])
        splits = splits.cast_column("text", Value("string"))  # it may be digits
    except Exception as error:  # a damaged file can fail anywhere
        sys.exit(f"cannot read {args.texts}: {error.__cause__ or error}")
    parts = {}
    for name in ("train", "test", "validation"):
        if name in splits:
            part = splits[name].filter(has_label, input_columns="label")
            if len(part) < len(splits[name]) and os.environ.get("RANK", "0") == "0":
                missing = len(splits[name]) - len(part)
                count = f"{missing} of {len(splits[name])} rows of {name}"
                print(f"{count} have no label (or -1): left out")
            if len(part) > 0:
                parts[name] = part
    if "train" not in parts or len(parts) == 1:
        sys.exit(f"{args.texts}: {'test' if 'train' in parts else 'train'} has no labels")
    train_data, val_data = [*parts.values()][:2]
    labels = sorted(train_data.unique("label"))  # words, or numbers from anywhere on
    unknown = set(val_data.unique("label")) - set(labels)
    if unknown:
        sys.exit(f"{args.texts}: {[*parts][1]} has labels that train has not: {sorted(unknown)}")
    if len(labels) < 2:
        sys.exit(f"{args.texts}: all labels of train are {labels[0]}")
    tokenizer = AutoTokenizer.from_pretrained(args.network)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # GPT-2's has none
    args.pad_token_id = tokenizer.pad_token_id
    options = {"padding": "max_length", "max_length": args.seq_len, "truncation": True}

    def encode(rows):
        encoded = tokenizer([text or "" for text in rows["text"]], **options)
        encoded["labels"] = [labels.index(label) for label in rows["label"]]
        return encoded

    columns = ["input_ids", "attention_mask", "labels"]
    parts = [part.map(encode, batched=True) for part in (train_data, val_data)]
    return [part.with_format("torch", columns) for part in parts]


def create_model(args, data):
    num_labels = len(data.unique("labels"))
    options = {"num_labels": num_labels, "ignore_mismatched_sizes": True}  # a new last layer
    options["dtype"] = torch.float32  # by default it is that of the file, such as fp16
    model = AutoModelForSequenceClassification.from_pretrained(args.network, **options)
    model.config.pad_token_id = args.pad_token_id
    return model


def create_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)


def learning_rate_factor(args, done):
    return 1 - done


def batch_loss(model, batch, args):
    labels = batch["labels"]
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels)
    correct = (output.logits.argmax(1) == labels).sum()
    sums = {"loss": output.loss * len(labels), "acc": correct, "count": len(labels)}
    return output.loss, sums
