"""Completes words with colons in bash, as PCI addresses have them, of which click knows nothing.

bash takes such a word for several (COMP_WORDBREAKS), and puts what it is answered in the place of the last of them alone.
"""

from __future__ import annotations

import os

from click.shell_completion import BashComplete, add_completion_class, split_arg_string

_SOURCE = """\
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} type value
    local word=${line##*[[:space:]]} before=
    [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && before=${word%%:*}:
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done < <(COMP_WORDS=$line %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class ColonsComplete(BashComplete):
    """Bash's, that is told the line and takes it apart itself."""

    source_template = _SOURCE

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the last, and the last, of a line up to the cursor."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        last = words.pop() if words and not line[-1:].isspace() else ""
        return words[1:], last
