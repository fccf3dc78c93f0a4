"""The compiler half: it exists, and is never asked to compile."""

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    binary_ext = "txt"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict) -> object:
        raise RuntimeError("only TRITON_INTERPRET=1 works with this backend")

    def add_stages(self, stages: dict, options: object, language: object = None) -> None:
        raise RuntimeError("only TRITON_INTERPRET=1 works with this backend")

    def load_dialects(self, context: object) -> None:
        return None

    def get_module_map(self) -> dict:
        return {}
