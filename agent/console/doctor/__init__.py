"""Named checks of a node: what each found, and how to mend it. They look and touch nothing."""
