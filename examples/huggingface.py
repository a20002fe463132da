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


def read_data(args):
    """Returns two datasets whose samples are dictionaries. `map` caches what it has made."""
    parts = load_dataset(args.texts, split=["train", "test"])
    parts = [part.cast_column("text", Value("string")) for part in parts]  # it may be digits
    labels = sorted(parts[0].unique("label"))  # words, or numbers from anywhere on
    unknown = set(parts[1].unique("label")) - set(labels)
    if unknown:  # the hub marks a label that is not public by -1
        sys.exit(f"{args.texts}: test has labels that train has not: {unknown}")
    tokenizer = AutoTokenizer.from_pretrained(args.network)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # GPT-2's has none
    args.pad_token_id = tokenizer.pad_token_id
    options = {"padding": "max_length", "max_length": args.seq_len, "truncation": True}

    def encode(rows):
        encoded = tokenizer([text or "" for text in rows["text"]], **options)
        encoded["labels"] = [labels.index(label) for label in rows["label"]]
        return encoded

    columns = ["input_ids", "attention_mask", "labels"]
    parts = [part.map(encode, batched=True) for part in parts]
    return [part.with_format("torch", columns) for part in parts]


def create_model(args, data):
    num_labels = len(data.unique("labels"))
    options = {"num_labels": num_labels, "ignore_mismatched_sizes": True}  # a new last layer
    options["dtype"] = torch.float32  # by default it is that of the file, such as fp16
    model = AutoModelForSequenceClassification.from_pretrained(args.network, **options)
    model.config.pad_token_id = args.pad_token_id
    return model


def batch_loss(model, batch, args):
    labels = batch["labels"]
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels)
    correct = (output.logits.argmax(1) == labels).sum()
    sums = {"loss": output.loss * len(labels), "acc": correct, "count": len(labels)}
    return output.loss, sums
