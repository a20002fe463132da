"""Tell the class of photographs by a network that images.py has trained on photographs.

    python examples/predict_photo.py photos.pt cat.jpg dog.jpg

The snapshot has the flags of the training and the names of the classes.
"""

import argparse
import sys
from pathlib import Path

import torch
from torchvision.transforms import v2

sys.path.append(str(Path(__file__).resolve().parent.parent / "singlegpu"))
import images  # noqa: E402


class Shape(list):
    """What create_model asks the data for: the shape of an image, and the classes."""


parser = argparse.ArgumentParser()
parser.add_argument("snapshot", help="what images.py --snapshot has written")
parser.add_argument("photos", nargs="+")
args = parser.parse_args()
snapshot = torch.load(args.snapshot, "cpu", weights_only=True)
settings = argparse.Namespace(**snapshot["settings"] | {"pretrained": False})  # nor a download
size = settings.image_size
data = Shape([(torch.empty(3, size, size),)])
data.classes = snapshot["classes"]
model = images.create_model(settings, data).eval()
model.load_state_dict(snapshot["model"])
crop = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), v2.PILToTensor()])
for path in args.photos:
    photo = crop(images.read_photo(path))  # (3, H, W) uint8
    with torch.no_grad():
        probabilities = model(photo[None] / 255).softmax(1)[0]  # (K,)
    best = int(probabilities.argmax())
    print(f"{path}: {data.classes[best]}, {probabilities[best]:.0%}")
