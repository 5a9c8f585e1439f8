"""The most common words of many languages and the most common Chinese characters."""

from __future__ import annotations

_BY_LANGUAGE = {
    "english": "the of and to in is that it was for on are as with his they at be this from have "
    "or by one had not but what all were when we there can an your which their said if do will "
    "each about how up out them then she many some so these would other into has more her two "
    "him see could no make than been its who now may any our only also such between where",
    "german": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als "
    "auch es an werden aus er hat dass sie nach wird bei einer um am sind noch wie einem über "
    "einen so zum war haben nur oder aber vor zur bis mehr durch man kann wenn sein ihre ihr wir",
    "french": "de la le et les des en un du une que est pour qui dans par plus pas au sur ne se ce "
    "il sont la avec son cette ou aux ses mais comme on tout nous sa fait été aussi leur bien "
    "peut ces elle même sans vous entre ont être",
    "spanish": "de la que el en los del se las por un para con no una su al es lo como más pero "
    "sus le ya este sí porque esta entre cuando muy sin sobre también me hasta hay donde quien "
    "desde todo nos durante uno ni contra otros ese fue ser son",
    "portuguese": "de que do da em um para com não uma os no se na por mais as dos como mas ao "
    "ele das seu sua ou quando muito nos já também só pelo pela até isso ela entre depois sem "
    "mesmo aos ser são está foi",
    "italian": "di che la il un per in una del si con non da le dei al come sono dal della nel gli "
    "lo ma più anche alla ha su questo se delle nella ai essere fra tra loro o è era degli dalla",
    "dutch": "de van het een en in is dat op te zijn met voor niet aan er om ook als dan maar bij "
    "hij uit door naar die over tot je worden wordt nog wat hun heeft kan deze of meer geen",
    "nordic": "och att det som en på är av för med till den har de inte om ett han men var jag "
    "sig från vi så kan man när år under också efter vid og er til at ikke jeg fra blev eller "
    "hun skal være etter ble ja tai on ei se että oli ovat mutta kun niin joka sekä myös voi",
    "polish": "nie się na to że jest do jak co za od przez tak ale czy po już jego dla są być "
    "oraz tym lub może który które która przy pod ze",
    "czech_slovak": "se na je že to ve jako za pro by ale jsou do po od ze byl podle při nebo jeho "
    "které který tak aby už jen také sa nie si ako čo aj pre zo bol alebo ktoré ktorý",
    "south_slavic_latin": "je se na da su za od koji kao ne bi to ili iz koje biti što ima sve "
    "ako nije može",
    "romanian": "și de în la cu care pe din nu un este mai să pentru sunt ce se au fi dar prin "
    "acest sau fost cel lui ca al ale într",
    "turkish": "bir ve bu da de için ile çok daha olarak olan gibi kadar sonra ama ne var en her "
    "ya göre değil",
    "hungarian": "hogy nem az és egy is meg csak volt mint már ez azt van de ki ezt el vagy kell "
    "lehet még amely",
    "baltic_estonian": "ir kad tai su į iš bet kaip yra un ar par no kas tas uz pie ja ei et oma "
    "ning või mis oli",
    "indonesian_malay": "yang dan di ini itu dengan untuk dari tidak pada dalam adalah ke akan "
    "atau oleh juga sebagai ada",
    "tagalog_swahili": "ang ng sa mga na at ay ito hindi para ni si na ya wa kwa za katika cha "
    "ni la kuwa",
    "vietnamese": "và của là có các không được cho trong người với một những để này đã khi từ về "
    "đến như tại",
    "catalan_latin": "el els amb per les que una dels és com del al est et in non ad ut cum quod "
    "sed qui quae esse sunt",
    "russian": "не на что он как это по но из за то все она так его от был для же вы бы мы они "
    "мне было если или при до уже ни во под чтобы со также может только их",
    "ukrainian_bulgarian_serbian": "що та на не до від за як але це його вона про для або по із "
    "ще бути які при се да от са че ще като във със към по един си би или је су што који од и",
    "greek": "και το να του η της με που την από για τα είναι στο των ότι θα οι σε δεν τον ως στην "
    "τη μια ένα αλλά τις ή στα αυτό κατά",
}

STOP_WORDS = frozenset(
    word for words in _BY_LANGUAGE.values() for word in words.split() if len(word) > 1
)

COMMON_HAN = frozenset(
    "的一是不了在人有我他这這个個们們中来來上大为為和国國地到以说說时時要就出会會可也你对對生能而子"
    "那得于於着著下自之年过過发發后後作里裡用道行所然家种種事成方多经經么麼去法学學如都同现現当當没沒"
    "动動面起看定天分还還进進好小部其些主样樣理心她本前开開但因只从從想实實日月第公司本文與与及或"
    "项項目号號者由此等被新工高长長重已无無市民业業表信息报報内內外度期"
)
