"""Make token files of a text for gpt.py: a vocabulary that fits the text, and its end apart.

    python examples/tokens.py my.txt --vocab_size 8192

The tokenizer is there, too: it makes text of the ids that --sample prints.
"""

import argparse
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("text")
parser.add_argument("--vocab_size", type=int, default=8192)
parser.add_argument("--out", default="my_tokens", help="folder that is written")
args = parser.parse_args()
(out := Path(args.out)).mkdir(parents=True, exist_ok=True)
tokenizer = ByteLevelBPETokenizer()
tokenizer.train([args.text], vocab_size=args.vocab_size)
tokenizer.save(str(out / "tokenizer.json"))
ids = np.array(tokenizer.encode(Path(args.text).read_text(encoding="utf-8")).ids, np.uint32)
num_val = min(len(ids) // 10, 2**18)  # as gpt.py does with a text
np.save(out / "train.npy", ids[:-num_val])
np.save(out / "val.npy", ids[-num_val:])
print(f"{len(ids)} tokens in {out}: train on them by")
print(f"python multigpu/gpt.py --dataset {out} --vocab_size {tokenizer.get_vocab_size()}")
