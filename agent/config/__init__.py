"""Reads the configuration, one TOML file, into typed values, and tells every mistake at once."""

from agent.config.file import DEFAULT_PATH, AgentConfig, Config, Difference, compare, load
from agent.config.problems import ConfigError, ConfigProblem

__all__ = [
    "DEFAULT_PATH",
    "AgentConfig",
    "Config",
    "ConfigError",
    "ConfigProblem",
    "Difference",
    "compare",
    "load",
]
