"""Pictures of one colour, captions that say it, and a model small enough to learn that in seconds."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

from PIL import Image
from transformers import PreTrainedTokenizerFast

COLOURS = {"river": (20, 40, 220), "market": (220, 30, 30), "station": (30, 200, 40)}
CAPTIONS = ["near the {a} .", "there is the {a} ."]
SIDE, PATCH = 16, 8
TOKENS = (SIDE // PATCH) ** 2

MODEL = [
    "model=tiny_vision",
    "model.architecture.image_token_id=48",
    "model.architecture.text_config.vocab_size=49",
    f"model.architecture.vision_config.image_size={SIDE}",
    f"model.architecture.vision_config.patch_size={PATCH}",
    "model.max_length=24",
]


def small_vision(folder: Path, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Overrides of the model, whose tokenizer has 48 tokens and gets one for the image."""
    tokenizer.add_tokens([f"w{i}" for i in range(48 - len(tokenizer))])
    tokenizer.save_pretrained(folder / "tokenizer")
    return [*MODEL, f"model.tokenizer={folder / 'tokenizer'}"]


def paint(path: Path, place: str, seed: int) -> None:
    """Save a picture in about a place's colour."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = tuple(max(0, min(255, c + rng.randint(-20, 20))) for c in COLOURS[place])
    Image.new("RGB", (rng.randint(16, 24), rng.randint(16, 24)), colour).save(path)


def write_captions(folder: Path, images: int, first: int = 0) -> Path:
    """Images and their captions as COCO has them, two captions an image; `objects` has one or two values."""
    records, captions = [], []
    for i in range(first, first + images):
        place = list(COLOURS)[i % 3]
        paint(folder / "images" / f"{i}.png", place, i)
        objects = [place] if i % 2 else [place, "sky"]
        records.append({"id": 1000 + i, "file_name": f"{i}.png", "objects": objects})
        captions += [
            {"id": len(captions), "image_id": 1000 + i, "caption": c.format(a=place)} for c in CAPTIONS
        ]
    path = folder / "captions.json"
    path.write_text(json.dumps({"info": {}, "images": records, "annotations": captions}))
    return path


def write_questions(folder: Path, images: int) -> Path:
    """A table of images and questions."""
    path = folder / "questions.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "question", "answer"])
        for i in range(images):
            place = list(COLOURS)[i % 3]
            paint(folder / f"q{i}.png", place, i)
            writer.writerow([f"q{i}.png", "Where is there ?", f"near the {place} ."])
    return path


def captions_task(folder: Path, train: int = 12, test: int = 6) -> list[str]:
    """Overrides of a captioning task."""
    return [
        "task=coco",
        f"task.path={write_captions(folder / 'train', train)}",
        f"task.image_folder={folder / 'train' / 'images'}",
        f"task.test_path={write_captions(folder / 'test', test, 100)}",
        f"task.test_image_folder={folder / 'test' / 'images'}",
        "task.test_rows=null",
        "task.labels=[]",
        "task.prompt='{image} Where :'",
        "task.writing=null",
    ]


def questions_task(folder: Path, train: int = 24, test: int = 6) -> list[str]:
    """Overrides of a visual-question task."""
    return [
        "task=scienceqa",
        f"task.path={write_questions(folder / 'train', train)}",
        f"task.test_path={write_questions(folder / 'test', test)}",
        "task.test_rows=null",
        "task.labels=[]",
        "task.text_column=question",
        "task.choices_column=null",
        "task.image_column=image",
        "task.label_column=answer",
        "task.prompt='{image} {text} :'",
        "task.writing=null",
    ]
