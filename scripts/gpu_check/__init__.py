"""What ``scripts/gpu_check.py`` is made of.

gpu_check.py ─▶ supervision.py ─▶ worker.py, in a process of its own ─▶ checks/, by bench.py and fixtures.py
                      └─▶ report.py, by bars.py ─▶ a JSON line for each row, and the verdict
"""
