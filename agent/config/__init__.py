"""The configuration: one TOML file, typed, with every mistake told at once."""

from agent.config.file import DEFAULT_PATH, load
from agent.config.model import AgentConfig, Config, Listen, Seconds
from agent.config.problems import ConfigError, ConfigProblem

__all__ = ["DEFAULT_PATH", "AgentConfig", "Config", "ConfigError", "ConfigProblem", "Listen", "Seconds", "load"]
