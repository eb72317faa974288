"""The words with which an answer is stated or denied in languages other than English and Chinese, as patterns."""

_NOUNS = (
    r"respuesta|resultado|réponse|résultat|(?:end)?antwort|ergebnis|lösung|resposta|risposta|risultato|ответ|итого|результат|відповідь"
    r"|odpowiedź|wynik|odpověď|cevap|yanıt|sonuç|jawaban|antwoord|svaret?|vastaus|válasz|răspuns(?:ul)?|απάντηση|उत्तर|คำตอบ"
    r"|đáp\s+(?:án|số)|(?:ال)?(?:جواب|إجابة|نتيجة)|پاسخ|ה?תשובה|答え|正解|정답|(?<![가-힣])답(?=[은:은이])"
)
_VERBS = "es|est|é|è|ist|lautet|beträgt|sería|serait|wäre|это|равен|равна|равно|є|jest|je|to|on|är|er|adalah|là|هو|هي|είναι|है|คือ|הוא|היא"
_NOT = r"(?:no|não|non|не|nie|ikke|inte|niet|không\s+phải)"

STATED = (
    rf"(?<!\w)(?:{_NOUNS})(?:[\s*_]+(?!(?:{_VERBS}|{_NOT})\s)[^\W\d_]+){{0,3}}?[\s*_\"']*"
    rf"(?P<foreign_denial>{_NOT}\s+)?(?:(?:n['’](?=est))?(?:{_VERBS})(?!\w)\s*:?|[はが은는이:=—→][、,]?|->|(?<=итого))"
)
"""Up to where the answer begins; the group foreign_denial is there where it is denied before its verb."""

DENIED_AT_ONCE = r"^\s*(?:nicht|pas|no|não|non|не|nie|ikke|inte|niet)\s"
DENIED_AFTERWARDS = r"ではな|ではあり|じゃな|아니|아닙|değil|नहीं|ليس"
DENIED = rf"(?<!\w)(?:nicht|n['’]est\s+pas|no\s+es|não\s+é|non\s+è|не|nie\s+jest|không\s+phải)(?!\w)|{DENIED_AFTERWARDS}"
"""A denial anywhere in a sentence."""
INSTEAD = r"(?:but|sondern|mais|sino|mas|ma|а|lecz|maar|utan)"
"""`not X but Y`."""
