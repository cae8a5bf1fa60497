"""Rows in the exact columns of public data sets, with short texts."""

from typing import Any

Row = dict[str, Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def gsm8k(n: int) -> Row:
    return {"question": f"{n} apples and 2?", "answer": f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}"}


def math(n: int) -> Row:
    solution = f"It is $\\boxed{{{n + 2}}}$."
    return {"problem": f"What is ${n} + 2$?", "level": "Level 1", "type": "Algebra", "solution": solution}


def math_500(n: int) -> Row:
    own = {"answer": str(n + 2), "subject": "Algebra", "level": 1, "unique_id": f"test/algebra/{n}.json"}
    return {"problem": math(n)["problem"], "solution": math(n)["solution"]} | own


def verl(n: int) -> Row:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [user(f"{n} and 2? After ####.")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 2)},
        "extra_info": {"split": "train", "index": n, "answer": gsm8k(n)["answer"], "question": gsm8k(n)["question"]},
    }


def openrlhf(n: int) -> Row:
    return {"input": f"{n} and 2?", "label": str(n + 2)}


def openrlhf_sft(n: int) -> Row:
    return {"input": f"{n} and 2?", "output": str(n + 2)}


def nemo_rl(n: int) -> Row:
    return {"messages": [user(f"{n} and 2?"), assistant(str(n + 2))], "task_name": "math"}


def tulu(n: int) -> Row:
    return {"messages": [user(f"{n} and 2?")], "ground_truth": str(n + 2), "dataset": "gsm8k"}


def verifiers(n: int) -> Row:
    return {"question": f"{n} and 2?", "answer": str(n + 2), "info": {"level": n}, "task": "sums"}


def trl(n: int) -> Row:
    return {"prompt": [user(f"{n} and 2?")], "completion": [assistant(str(n + 2))]}


def trl_text(n: int) -> Row:
    return {"prompt": f"{n} and 2?", "completion": str(n + 2)}


def trl_pair(n: int) -> Row:
    return {"prompt": [user(f"{n} and 2?")], "chosen": [assistant(str(n + 2))], "rejected": [assistant("no")]}


def implicit_pair(n: int) -> Row:
    asked = user(f"{n} and 2?")
    return {"chosen": [asked, assistant(str(n + 2))], "rejected": [asked, assistant("no")]}


def ultrafeedback(n: int) -> Row:
    asked = f"{n} and 2?"
    own = {"prompt_id": str(n), "score_chosen": 8.0, "score_rejected": 3.0}
    return {"prompt": asked, "messages": implicit_pair(n)["chosen"]} | implicit_pair(n) | own


def openrlhf_pair(n: int) -> Row:
    return {"input": f"{n} and 2?", "chosen": str(n + 2), "rejected": "no"}


def nemo_pair(n: int) -> Row:
    ranked = [{"rank": 1, "completion": [assistant("no")]}, {"rank": 0, "completion": [assistant(str(n + 2))]}]
    return {"context": [user(f"{n} and 2?")], "completions": ranked, "task_name": "preference"}


def kto(n: int) -> Row:
    return {"prompt": [user(f"{n} and 2?")], "completion": [assistant(str(n + 2))], "label": n % 2 == 0}


def openrlhf_label(n: int) -> Row:
    return {"input": f"{n} and 2?", "output": str(n + 2), "label": 1 - n % 2}


def alpaca(n: int) -> Row:
    return {"instruction": "Add.", "input": f"{n} and 2", "output": str(n + 2)}


def share_gpt(n: int) -> Row:
    said = [{"from": "human", "value": f"{n} and 2?"}, {"from": "gpt", "value": str(n + 2)}]
    return {"id": f"row-{n}", "conversations": said}


def dolly(n: int) -> Row:
    return {"instruction": "Add.", "context": f"{n} and 2", "response": str(n + 2), "category": "closed_qa"}


def meta_math(n: int) -> Row:
    return {"query": f"{n} and 2?", "response": f"It is {n + 2}. The answer is: {n + 2}", "type": "GSM_Rephrased"}
