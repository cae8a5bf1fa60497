"""``python -m gpu_day.trl_steps FOLDER STEPS``: TRL's GRPO with vLLM in one process, on the work of the 1.51B stage.

Prints the seconds of each step. FOLDER is gpu_day.model's."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

ONE_PROCESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
GROUPS, GROUP_SIZE, ANSWER, ROWS = 16, 8, 512, 4
"""Rows at once: with 16 the logits fill 80 GB."""


def main(folder: Path, steps: int) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # where it is installed

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            print(f"seconds {time.perf_counter() - self.start}", flush=True)

    questions = [json.loads(line)["question"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        bf16=True,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=GROUPS * GROUP_SIZE // ROWS,
        gradient_checkpointing=False,
        num_generations=GROUP_SIZE,
        max_completion_length=ANSWER,
        max_steps=steps,
        learning_rate=1e-6,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.25,
        vllm_max_model_length=1024,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": question} for question in questions]),
    )
    trainer.add_callback(Clock())
    trainer.train()


if __name__ == "__main__":
    os.environ.update(ONE_PROCESS)
    main(Path(sys.argv[1]), int(sys.argv[2]))
