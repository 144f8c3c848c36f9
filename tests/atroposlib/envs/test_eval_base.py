"""Stand-alone evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.eval import EvalBase, evaluate_log, pass_at_k


@pytest.mark.parametrize(
    ("m", "c", "k", "expected"),
    [(10, 3, 1, 0.3), (10, 0, 5, 0.0), (4, 4, 2, 1.0), (5, 2, 2, 0.7), (3, 2, 2, 1.0), (4, sum([1.0, 0.0]), 1, 0.25)],
)
def test_pass_at_k(m: int, c: float, k: int, expected: float):
    assert pass_at_k(m, c, k) == pytest.approx(expected)


class Squares(EvalBase):
    def setup_data(self) -> list[int]:
        return [1, 2, 3, 4]

    async def run_item(self, server: Any, data_item: int) -> tuple[dict[str, float], Any]:
        answer = await self.chat_completion(server, [{"role": "user", "content": str(data_item)}])
        return {"accuracy": float(answer == data_item**2)}, {"item": data_item, "answer": answer}


async def test_all_items_run_and_are_averaged(tmp_path: Path):
    asked: list[dict[str, Any]] = []

    class Server:
        config = SimpleNamespace(model_name="squarer")

        async def chat_completion(self, **kwargs: Any) -> int:
            asked.append(kwargs)
            number = int(kwargs["messages"][0]["content"])
            return number**2 if number != 3 else 0

    evaluation = Squares(pass_at_n=2, pass_at_n_samples=4, temperature=0.6, eval_dir=str(tmp_path))
    assert evaluation.get_generation_params() == {"temperature": 0.6, "n": 4, "top_p": 1.0, "max_tokens": -1}
    assert await evaluation(SimpleNamespace(servers=[Server()], chat_completion=Server().chat_completion)) == {
        "accuracy": 0.75
    }
    assert asked[0]["split"] == "eval"
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert record["results"]["atropos|Squares@2:4|0"] == {"accuracy": 0.75}
    assert record["config_general"]["model_name"] == "squarer"
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4


def test_without_a_folder_only_the_table(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    evaluate_log({"accuracy": 1.0}, task_name="t")
    assert "accuracy" in capsys.readouterr().out
    assert "data_dir_to_save_evals" in caplog.text
