"""GRPO by TRL in one process, for beside_trl.py: seconds of each step, one a line. Runs where TRL is."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports] - in an environment of its own


class _Clock(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        print(f"seconds {time.perf_counter() - self._start}", flush=True)


def main(settings: dict[str, Any]) -> None:
    """TRL run.

    ``settings``: model, dtype, prompts (texts), group_size, max_new_tokens, rows (a batch), steps, folder.
    """
    num_samples = settings["group_size"] * settings["prompts_per_step"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,  # the weights themselves are, if ``dtype`` is
        per_device_train_batch_size=settings["rows"],
        gradient_accumulation_steps=num_samples // settings["rows"],
        gradient_checkpointing=False,
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["steps"],
        shuffle_dataset=False,
        learning_rate=1e-5,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in settings["prompts"]]),
    )
    trainer.add_callback(_Clock())
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history[: settings["steps"]]]
    print(f"length {sum(lengths) / len(lengths)}", flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
