"""Tool calls of `meshserve chat` as people read them: `-> get_weather({"city": "Paris"})`, each on a line."""

from ..text.answers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart


class ReadableCalls:
    """Turns the parts of one answer into plain text. Reasoning has none."""

    def __init__(self) -> None:
        self._is_open = False  # a call is
        self._is_begun = False  # something stands on the last line

    def text(self, part: AnswerPart) -> str:
        """Returns the text of one more part."""
        if isinstance(part, CallPart):
            begin = f"{self.end()}\n" if self._is_begun else ""
            self._is_open = self._is_begun = True
            return f"{begin}-> {part.name}("
        if isinstance(part, ArgumentsPart):
            return part.text
        if isinstance(part, ContentPart):
            begin = f"{self.end()}\n" if self._is_open else ""
            self._is_begun = True
            return begin + part.text
        return ""

    def end(self) -> str:
        """Returns what ends the last call, if there is one that is open."""
        was_open, self._is_open = self._is_open, False
        return ")" if was_open else ""
