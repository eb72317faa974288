"""Regex fragments for phrases that state or deny an answer in languages other than English and
Chinese."""

_NOUNS = (
    r"respuesta|resultado|réponse|résultat|(?:end)?antwort|ergebnis|lösung|resposta|risposta|risultato|ответ|итого|результат|відповідь"
    r"|odpowiedź|wynik|odpověď|(?:cevap|seçenek|şık)|yanıt|sonuç|jawaban|antwoord|svaret?|vastaus|válasz|răspuns(?:ul)?|απάντηση|उत्तर|คำตอบ"
    r"|đáp\s+(?:án|số)|(?:ال)?(?:جواب|إجابة|نتيجة)|پاسخ|ה?תשובה|答え|正解|정답|(?<![가-힣])답(?=[은:은이])"
)
_VERBS = "es|est|é|è|ist|lautet|beträgt|sería|serait|wäre|это|равен|равна|равно|є|jest|je|to|on|är|er|adalah|là|هو|هي|είναι|है|คือ|הוא|היא"
_NOT = r"(?:no|não|non|не|nie|ikke|inte|niet|không\s+phải)"

STATEMENT = (
    rf"(?<!\w)(?:{_NOUNS})(?:[\s*_]+(?!(?:{_VERBS}|{_NOT})\s)[^\W\d_]+){{0,3}}?[\s*_\"']*"
    rf"(?P<foreign_denial>{_NOT}\s+)?(?:(?:n['’](?=est))?(?:{_VERBS})(?!\w)\s*:?|[はが은는이:=—→][、,]?|->|(?<=итого))"
)
"""Up to where the answer begins; the group foreign_denial is there where it is denied before its
verb."""

LEADING_DENIAL = r"^\s*(?:nicht|pas|no|não|non|не|nie|ikke|inte|niet)\s"
TRAILING_DENIAL = r"ではな|ではあり|じゃな|아니|아닙|değil|नहीं|ليس"
DENIAL = rf"(?<!\w)(?:nicht|n['’]est\s+pas|no\s+es|não\s+é|non\s+è|не|nie\s+jest|không\s+phải)(?!\w)|{TRAILING_DENIAL}"
"""A denial anywhere in a sentence."""
CORRECTION = r"(?:but|sondern|mais|sino|mas|ma|а|lecz|maar|utan)"
"""`not X but Y`."""

VERIFICATION = (
    "probe|vérif(?:ication|ions)|comprobación|comprobemos|verifica(?:ção|ción|mos)?|verifichiamo|проверка|проверим|验证|检验|验算|検算|확인|검산"
    "|sprawdzenie|controle"
)
"""How a check of the answer begins."""
MISTAKE = "不对|错|falsch|faux|incorrecto|неверно"
CONCLUSION = (
    "donc|also|por (?:lo "
    ")?tanto|portanto|quindi|итак|значит|следовательно|ответ|所以|因此|故|答|综上|したがって|よって|따라서"
)
CONTRAST = (
    r"但|所以|因此|しかし|よって|sin "
    r"embargo|pero|cependant|mais|donc|jedoch|aber|also\b|mas\b|portanto|но\b|ma\b|quindi"
)
"""What introduces an answer after a refusal."""
REFUSAL = (
    r"无法(?:确定|回答|解决|计算|提供|给出|判断|求)|不能(?:确定|回答|帮)|不知道|抱歉|对不起|信息不足|条件不足"
    r"|申し訳|できません|わかりません|分かりません|求められません|죄송|할 수 없|알 수 없|모르겠"
    r"|\bno (?:puedo|podemos|se puede|sé)\b|\blo siento\b|\bje ne "
    r"(?:peux|sais)\b|\bdésolée?\b|\bimpossible de\b"
    r"|\bnicht (?:möglich|bestimm|beantwort|lös|berechn)\w*|\btut mir leid\b|\bweiß (?:ich "
    r")?nicht\b"
    r"|\bnão (?:posso|é possível|sei)\b|\bdesculpe\b|\bnon (?:posso|è possibile|so)\b|\bmi "
    r"dispiace\b"
    r"|не (?:могу|знаю)|невозможно|извините|\bnie (?:mogę|można|wiem)\b|لا (?:أستطيع|يمكن)|آسف"
)

PREPOSITIONS = (
    "en|w|we|za|během|trong|dalam|på|op|bis|hasta|até|fino "
    "a|tot|nach|für|bei|mit|pro|von|aus|je|zu je"
    "|pour|après|dans|avec|à|au|pendant|por|para|con|sur|su|después "
    "de|durante|per|dopo|em|após|com|depois de"
    "|по|за|из|для|через|после|на|в|до"
)
SUBORDINATE_CLAUSE = (
    r"(?:después de|tras|antes de|após|depois de|antes de|avant de|dopo aver|prima di)\s+[^\W\d_]+"
)
ARTICLES = "der|des|den|dem|de|del|dei|delle|di|du|da|los|las|les|os|gli|aux"
"""With a preposition in them, or of things that are known: der 200 Seiten."""
BOUND = (
    "inférieure?s?|supérieure?s?|éga(?:l|ux|les?)|menor(?:es)?|mayor(?:es)?|maior(?:es)?|igua(?:l|les|is)|minori|maggiori|uguali|kleiner|größer"
    "|gleich|höchstens|меньше|больше|не\\s+превосходящ\\w+|не\\s+превышающ\\w+"
)
BOUND_JOINS = "ou|o|oder|или|que|als|à|a|di|чем"
GERUND = r"[^\W\d_]{2,}(?:ando|iendo|endo|indo)"
COPULA = "ist|sind|beträgt|betragen|war|est|sont|était|fait|es|son|era|é|são|è|sono|jest"
SUMS = r"(?:somm|summ|kost|coût|pre[zc]|preis|prix|distan|равн|составля|стоит)\w*"
"""What takes the answer after a preposition: la somme est de 48, el precio es de 48."""
CONDITION = "wenn|falls|si|se|если|如果|若"
CONJUNCTION = "und|oder|et|ou|y|o|e|и|或"
IN_YEAR = "im|bis|seit|ab|en|dès|depuis|desde|nel|dal|em|w|od|в|с|к|i|sedan"
YEAR = r"jahr(?:e|es)?|l['’]an(?:née)?|(?:el\s+)?año|(?:o\s+)?ano|l['’]anno|anno|rok(?:u)?|năm|året|jaar|tahun"
YEAR_SUFFIX = "年度?|년|год[ау]?|roku|yılında"
WILL_BE = "wird|sera|será|avrà|terá|tendrá|aura"
IN_TOTAL = (
    r"insgesamt|zusammen|gesamt\w*|en tout|au total|en total|in totale|in tutto|no total|ao "
    r"todo|totaal|totalt|łącznie|razem"
    r"|celkem|toplam\w*|всего|вместе|итого|共|总共|一共|合计|合計|全部で|총|모두"
)
REMAINDER = (
    r"übrig|bleib\w*|blieb\w*|rest(?:e|ent|ait|an|ano|am|ante)\b|qued(?:a|an|ó|aron)\b|sobra\w*|riman\w*|осталось|остал\w+|оста[её]тся|zosta\w+"
    r"|zbýv\w*|zůstal\w*|zbylo|kal(?:dı|ır|an)\b|over\b|剩|残|余り|남"
)
