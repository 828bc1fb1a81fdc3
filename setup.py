"""The compiled part of moecast; everything else of the build is in pyproject.toml.

Where there is no C compiler, moecast is installed without it, and onnxruntime computes the
predictors' networks.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "predictors.networks.kernels",
            ["predictors/networks/kernels.c"],
            extra_compile_args=["-O3"],
            libraries=["m"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
