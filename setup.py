"""The compiled half of the shard codec. Everything else about the package is in pyproject.toml.

``optional``: where there is no C compiler, or it fails, the package installs without it and works, slower.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "specdec_tap.shards._native",
            ["specdec_tap/shards/_native.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        )
    ]
)
