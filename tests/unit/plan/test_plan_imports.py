import subprocess
import sys

HEAVY = ("torch", "ray", "transformers", "vllm")


def test_config_and_plan_import_nothing_heavy() -> None:
    code = f"import sys, drumroll.config.models, drumroll.plan.render, drumroll.plan; print([m for m in {HEAVY} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.strip() == "[]"
