"""Runs one environment file as `python FILE ARGUMENTS` would, with stand-ins for what is not on this machine.

The stand-ins: small made-up rows for data sets, a tiny tokenizer for those of the hub, the loopback endpoint for every remote model,
small files for what environments download. The environment itself and the library are as they are.

    python stand_ins.py FOLDER ENDPOINT FILE [ARGUMENTS]      (FILE may be a module: environments.name)
"""

from __future__ import annotations

import csv
import json
import os
import runpy
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SPLITS = ("train", "test", "validation", "dev", "free_form", "multiple_choice")
ROWS = Path(__file__).with_name("stand_in_rows.yaml")


def fill(value: Any, i: int) -> Any:
    """One value of row `i`, as the head of stand_in_rows.yaml says."""
    if isinstance(value, str):
        return value.replace("{i}", str(i)).replace("{n}", str(i + 1))
    if isinstance(value, list):
        return [fill(part, i) for part in value]
    if isinstance(value, dict):
        if set(value) == {"cycle"}:
            return value["cycle"][i % len(value["cycle"])]
        return {key: fill(part, i) for key, part in value.items()}
    return value


def stand_in_data_sets(with_images: bool) -> None:
    import datasets
    import yaml
    from PIL import Image

    known = yaml.safe_load(ROWS.read_text())

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        name = " ".join(str(part) for part in (*args[:2], kwargs.get("path"), kwargs.get("name")) if part).lower()
        key = next(key for key in known if key in name)
        count, row = known[key]
        rows = [fill(row, i) for i in range(count)]
        if with_images:
            picture = Image.new("RGB", (32, 32), (200, 10, 10))
            rows = [{**row, "image": picture, "images": [picture]} for row in rows]
        data = datasets.Dataset.from_list(rows)
        if kwargs.get("streaming"):
            data = data.to_iterable_dataset()
        if kwargs.get("split") or len(args) > 2:
            return data
        return datasets.DatasetDict(dict.fromkeys(SPLITS, data))

    datasets.load_dataset = load_dataset


def stand_in_hub(folder: Path) -> None:
    """Tokenizers by name, and the table files that one environment takes from the hub."""
    import huggingface_hub
    import transformers

    real = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        return real(name if os.path.isdir(str(name)) else str(folder / "tokenizer"), *args, **kwargs)

    def list_repo_tree(*args: Any, **kwargs: Any) -> list[Any]:
        return [SimpleNamespace(path=f"{name}/train/0.csv", size=1) for name in ("hotel", "flight")]

    transformers.AutoTokenizer.from_pretrained = from_pretrained
    huggingface_hub.list_repo_tree = list_repo_tree
    huggingface_hub.hf_hub_download = lambda *args, **kwargs: str(folder / "turns.csv")  # type: ignore[assignment]


def stand_in_models(endpoint: str) -> None:
    """Clients of remote models talk to the loopback endpoint."""
    import openai

    from atroposlib.envs.server_handling.openai_routes import OpenAIRoutes

    def redirect(kind: Any) -> None:
        real = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if "127.0.0.1" not in str(kwargs.get("base_url")):
                kwargs |= {"base_url": endpoint, "api_key": "x"}
            real(self, *args, **kwargs)

        kind.__init__ = init

    real_url: Callable[[Any], str] = OpenAIRoutes.effective_base_url
    redirect(openai.OpenAI)
    redirect(openai.AsyncOpenAI)
    OpenAIRoutes.effective_base_url = lambda self: url if "127.0.0.1" in (url := real_url(self)) else endpoint  # type: ignore[method-assign]


def write_files(folder: Path) -> None:
    """What environments read from disk or would download; written once for all runs."""
    from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

    make_tiny_tokenizer(folder / "tokenizer")
    pages = [
        {"id": str(i), "html": f'<html><body><img src="{i}.png"><input id="a{i}"></body></html>'} for i in range(12)
    ]
    (folder / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    words = folder / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("apple\nbanana\nstrawberry\nelephant\nmississippi\nletter\n")
    (words / "README").write_text("")
    with (folder / "turns.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["ID", "Filled_Template", "Filled_Plan"])
        for i in range(12):
            writer.writerow([i, "assistant: hello", ""])
            writer.writerow([i, f"user: find hotel {i}", 'hotels = search_hotels(city=["Paris"])'])
            writer.writerow([i, "assistant: which?", ""])
            writer.writerow([i, "user: the first", 'print("ok")'])
    tables = folder / "wikisql" / "data"
    tables.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        asked = [
            {"table_id": "t1", "question": f"names {i}?", "sql": {"sel": 0, "agg": 0, "conds": []}} for i in range(10)
        ]
        table = {"id": "t1", "header": ["name", "age"], "rows": [["ann", 3], ["bob", 4]], "types": ["text", "real"]}
        (tables / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
        (tables / f"{split}.tables.jsonl").write_text(json.dumps(table) + "\n")
        sqlite3.connect(tables / f"{split}.db").close()


def main() -> None:
    folder, endpoint, target, *arguments = sys.argv[1:]
    stand_in_data_sets(with_images="multimodal" in target)
    stand_in_hub(Path(folder))
    stand_in_models(endpoint)
    sys.argv = [target, *arguments]
    if target.endswith(".py"):
        sys.path[0] = str(Path(target).parent)
        runpy.run_path(target, run_name="__main__")
    else:
        del sys.path[0]
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
