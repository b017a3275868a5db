from tests.left_behind import nothing_left_behind

__all__ = ["nothing_left_behind"]
