"""Judge: IFEval's own checker, as lm-evaluation-harness carries it, and quantkit's, over replies
that follow and miss every instruction.

    PYTHONPATH=. python tests/judges/ifeval_agreement.py [--nltk DIR]     in a virtual environment that has lm-eval (`make test-lm-eval`)

DIR holds NLTK's punkt_tab, which lm-eval would download; the verdict of every instruction must be
equal, strict and loose. The four kinds that rest on models (punkt's sentences and words,
langdetect's languages) may differ where replies are at the border: at most one in fifty.
"""

import argparse
import functools
import itertools
import json
import os
import sys
from collections import Counter

TEXTS = [
    "",
    " ",
    "Yes.",
    "My answer is yes.",
    "my answer is no.",
    "My answer is maybe. I am not sure.",
    '"A quoted reply."',
    '"Half quoted',
    '{"a": 1, "b": [2, 3]}',
    '```json\n{"a": 1}\n```',
    "```JSON\n[1, 2]\n```",
    "{'a': 1}",
    "not json at all, really",
    "<<A Title>>\n\nThis text has a title. It has two sentences.",
    "<<>>\nAn empty title.",
    "< <No title> >",
    "* one\n* two\n* three",
    "- one\n- two\n- three\n",
    "  * one\n  - two\n** not **\n*** no",
    "1. one\n2. two",
    "*first* and *second* and **third**",
    "** ** and * * are empty, *this* is not",
    "SECTION 1\nalpha\nSECTION 2\nbeta\nSECTION 3",
    "Section 1\nalpha\nSection2\nbeta",
    "section 1: alpha",
    "First part.\n***\nSecond part.\n***\nThird part.",
    "***\nFirst part.\n***\nSecond part.\n***",
    "First.\n***\n\n***\nSecond.",
    "One response.\n******\nAnother response.",
    "One response.\n******\nOne response.",
    "******\nOne.\n******\nTwo.\n******",
    "One.\n******\n\n******\nTwo.",
    "Hello there.\n\nWeather is fine today.\n\nBye now.",
    "Hello there.\n\n'Weather' is fine today.\n\n\n\nBye now.",
    "Alpha\n\nbeta, gamma\n\nDelta!",
    "Dear [name], send it to [address] before [date].",
    "A list [with\na line break] in it. And [one].",
    "This is all.\n\nP.S. I forgot the keys.",
    "This is all.\n\nP. S. I forgot the keys.",
    "This is all. p.p.s I forgot more.",
    "This is all.\nP.P.S. I forgot more.",
    "PS: no points here",
    "WRITE ALL OF THIS IN CAPITAL LETTERS PLEASE, AND DO NOT FORGET THAT IT IS ENGLISH.",
    "write all of this in small letters please and do not forget that it is english.",
    "The CAPITAL words HERE are FOUR: USA, it's, I'M.",
    "NASA and the U.S. are ALL-CAPS; A is one as well. I AM.",
    "Is there anything else I can help with?",
    'It is done. "Any other questions?"',
    "Write a poem about rain. Here it is: rain falls on the roof and the river and the road.",
    "write a poem about rain.\nRain falls.",
    "Mr. Smith went to Washington, D.C., on Jan. 5. He met Dr. Jones at 3.30 p.m. They talked! Was "
    "it long? No.",
    "It costs 3.5 dollars. Prices rose... a lot. See www.example.com for more. Done",
    "One. Two. Three. Four. Five. Six. Seven. Eight. Nine. Ten.",
    'He said: "Come here." She came. (They left.) It rained, e.g. in May, etc. Then J. K. Rowling '
    "wrote on.",
    "The correlated data are correlated and experiencing a correlated effect. Friends like friends.",
    "banana bandana, apple and orange juice\n",
    "Ich habe heute keine Zeit, weil ich mit der Arbeit nicht fertig bin und es schon spät ist.",
    "Je ne suis pas sûr que ce soit une bonne idée, mais nous pouvons essayer avec les autres dans "
    "la maison.",
    "No estoy seguro de que sea una buena idea, pero podemos intentarlo con los otros en la casa.",
    "Não tenho certeza de que seja uma boa ideia, mas podemos tentar com os outros na casa.",
    "Non sono sicuro che sia una buona idea, ma possiamo provare con gli altri nella casa.",
    "Я не уверен, что это хорошая идея, но мы можем попробовать с другими людьми.",
    "Не съм сигурен, че това е добра идея, но можем да опитаме с другите хора от къщата.",
    "मुझे नहीं लगता कि यह एक अच्छा विचार है, लेकिन हम कोशिश कर सकते हैं और देख सकते हैं।",
    "मला वाटत नाही की ही चांगली कल्पना आहे, पण आपण प्रयत्न करू शकतो आणि पाहू शकतो.",
    "मलाई लाग्दैन कि यो राम्रो विचार हो, तर हामी प्रयास गर्न सक्छौं र हेर्न सक्छौं।",
    "أنا لست متأكدا من أن هذه فكرة جيدة، لكن يمكننا أن نحاول مع الآخرين في البيت.",
    "من مطمئن نیستم که این ایده خوبی است، اما می توانیم با دیگران در خانه تلاش کنیم.",
    "مجھے یقین نہیں ہے کہ یہ ایک اچھا خیال ہے لیکن ہم دوسروں کے ساتھ کوشش کر سکتے ہیں۔",
    "ฉันไม่แน่ใจว่านี่เป็นความคิดที่ดีหรือไม่ แต่เราสามารถลองได้",
    "이것이 좋은 생각인지 확신할 수 없지만 우리는 시도해 볼 수 있습니다.",
    "இது ஒரு நல்ல யோசனையா என்று எனக்குத் தெரியவில்லை, ஆனால் நாம் முயற்சி செய்யலாம்.",
    "ఇది మంచి ఆలోచన అని నాకు ఖచ్చితంగా తెలియదు, కానీ మనం ప్రయత్నించవచ్చు.",
    "ಇದು ಒಳ್ಳೆಯ ಆಲೋಚನೆ ಎಂದು ನನಗೆ ಖಚಿತವಿಲ್ಲ, ಆದರೆ ನಾವು ಪ್ರಯತ್ನಿಸಬಹುದು.",
    "ਮੈਨੂੰ ਯਕੀਨ ਨਹੀਂ ਹੈ ਕਿ ਇਹ ਇੱਕ ਚੰਗਾ ਵਿਚਾਰ ਹੈ, ਪਰ ਅਸੀਂ ਕੋਸ਼ਿਸ਼ ਕਰ ਸਕਦੇ ਹਾਂ।",
    "મને ખાતરી નથી કે આ એક સારો વિચાર છે, પરંતુ આપણે પ્રયાસ કરી શકીએ છીએ.",
    "Tôi không chắc đây là một ý tưởng hay, nhưng chúng ta có thể thử với những người khác trong "
    "nhà.",
    "En ole varma, onko tämä hyvä ajatus, mutta voimme yrittää muiden kanssa ja katsoa, mitä se on.",
    "Sina uhakika kama hili ni wazo zuri, lakini tunaweza kujaribu na watu wengine katika nyumba "
    "ya kwa ajili hii.",
    "Nie jestem pewien, czy to jest dobry pomysł, ale możemy spróbować z innymi i zobaczyć, jak to "
    "się uda.",
]
TEXTS += [f"Sure, here it is:\n{text}" for text in TEXTS[3:48]] + [
    f"{text}\nI hope this helps!" for text in TEXTS[3:48]
]
TEXTS += [f"*{text}*" for text in TEXTS[3:30]]
LANGUAGES = "en de fr es pt it ru bg hi mr ne ar fa ur th ko ta te kn pa gu vi fi sw pl"
MODELLED = {
    "number_sentences",
    "response_language",
    "english_capital",
    "english_lowercase",
    "capital_word_frequency",
}


FEW, RELATIONS = (1, 2, 3), ("less than", "at least")
ENDS = ("Any other questions?", "Is there anything else I can help with?")
ASKED = {
    "keywords:existence": {
        "keywords": (["rain"], ["Rain", "roof"], ["correlated", "experiencing"], ["a"])
    },
    "keywords:forbidden_words": {
        "forbidden_words": (["rain"], ["one", "first"], ["frien"], ["is"])
    },
    "keywords:frequency": {"keyword": [" correlated"], "frequency": FEW, "relation": RELATIONS},
    "keywords:letter_frequency": {
        "letter": ["A"],
        "let_frequency": (4, 8, 12),
        "let_relation": RELATIONS,
    },
    "length_constraints:number_sentences": {"num_sentences": (2, 4, 6), "relation": RELATIONS},
    "length_constraints:number_words": {"num_words": (5, 10, 15), "relation": RELATIONS},
    "change_case:capital_word_frequency": {
        "capital_frequency": (2, 4, 6),
        "capital_relation": RELATIONS,
    },
    "length_constraints:number_paragraphs": {"num_paragraphs": FEW},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": [3],
        "nth_paragraph": FEW,
        "first_word": ("weather", "Beta", "hello"),
    },
    "detectable_content:number_placeholders": {"num_placeholders": FEW},
    "detectable_content:postscript": {"postscript_marker": ("P.S.", "P.P.S", "PS:")},
    "detectable_format:number_bullet_lists": {"num_bullets": FEW},
    "detectable_format:number_highlighted_sections": {"num_highlights": FEW},
    "detectable_format:multiple_sections": {
        "section_spliter": ("SECTION", "Section "),
        "num_sections": FEW,
    },
    "detectable_format:constrained_response": {},
    "detectable_format:json_format": {},
    "detectable_format:title": {},
    "language:response_language": {"language": LANGUAGES.split()},
    "startend:end_checker": {"end_phrase": ENDS},
    "startend:quotation": {},
    "combination:repeat_prompt": {"prompt_to_repeat": ["Write a poem about rain."]},
    "combination:two_responses": {},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "punctuation:no_comma": {},
}
"""Instructions, and the values of each of their parameters."""


def instructions():
    return [
        (name, dict(zip(parameters, values)))
        for name, parameters in ASKED.items()
        for values in itertools.product(*parameters.values())
    ]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--nltk")
    given = options.parse_args()
    if given.nltk:
        os.environ["NLTK_DATA"] = given.nltk
    import langdetect
    from lm_eval.tasks.ifeval import utils

    from quantkit.evaluation.grading.instructions import CHECKS, check_instructions

    langdetect.DetectorFactory.seed = 0
    # With a seed it says the same of a text each time, and takes most of the time.
    langdetect.detect = functools.cache(langdetect.detect)
    assert ASKED.keys() == set(CHECKS)
    judges = utils.test_instruction_following_strict, utils.test_instruction_following_loose
    verdicts, differ = Counter(), Counter()
    for text, (name, parameters) in itertools.product(TEXTS, instructions()):
        example, kind = utils.InputExample(0, [name], "", [parameters]), name.split(":")[1]
        for loose, judge in enumerate(judges):
            theirs = judge(example, text).follow_instruction_list
            ours = check_instructions(text, [name], [parameters], loose=bool(loose))
            verdicts[kind] += 1
            differ[kind] += ours != theirs
            if ours != theirs and kind not in MODELLED:
                print("DIFFERS", name, parameters, "loose" if loose else "strict", repr(text), ours)
    for kind, count in sorted(verdicts.items()):
        print(f"{kind:28s} {count - differ[kind]} of {count}")
    told = {"verdicts": verdicts.total(), "differ": differ.total()}
    print(json.dumps(told | {"differ_by_models": sum(differ[kind] for kind in MODELLED)}))
    sys.exit(
        any(differ[one] > (0.02 if one in MODELLED else 0) * verdicts[one] for one in verdicts)
    )


if __name__ == "__main__":
    main()
