"""The coordination service's strings as a dictionary, for tests of what processes say to each other."""

from jaxcoll import coordination


class Store:
    """One dictionary in the place of the service, and whose turn it is to speak.

    Attributes:
        held: all strings by key.
        me: the process that asks.
        answers: off, the service is gone.
    """

    def __init__(self, monkeypatch, processes: int):
        self.held: dict[str, str] = {}
        self.me, self.answers = 0, True
        monkeypatch.setattr(coordination, "in_a_job", lambda: processes > 1)
        monkeypatch.setattr(coordination, "process_count", lambda: processes)
        monkeypatch.setattr(coordination, "process_index", lambda: self.me)
        monkeypatch.setattr(coordination, "put", self.put)
        monkeypatch.setattr(coordination, "put_first", lambda key, value: self.held.setdefault(key, value) == value)
        monkeypatch.setattr(coordination, "everything_under", self.everything_under)
        monkeypatch.setattr(coordination, "drop", self.drop)

    def put(self, key: str, value: str) -> None:
        if not self.answers:
            raise OSError("the service is gone")
        self.held[key] = value

    def everything_under(self, folder: str) -> dict[str, str]:
        if not self.answers:
            raise OSError("the service is gone")
        return {k.removeprefix(f"{folder}/"): v for k, v in self.held.items() if k.startswith(f"{folder}/")}

    def drop(self, folder: str) -> None:
        for key in [key for key in self.held if key.startswith(f"{folder}/")]:
            del self.held[key]
